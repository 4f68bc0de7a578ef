"""Training in torch: data, models, quantization-aware training, LoRA, and the loop.

Its models are saved as transformers and diffusers save them, so that ``intaglio export`` takes them like anybody's.
Needs the extra ``train``; nothing else of Intaglio imports this room.
"""
