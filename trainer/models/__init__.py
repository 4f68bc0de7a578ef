"""The models that are trained: those of transformers and diffusers, built from recipes and saved as these save them."""
