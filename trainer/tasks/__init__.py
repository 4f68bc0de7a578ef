"""What is learned: a model with its loss, and how it is saved."""
