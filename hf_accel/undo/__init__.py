"""The changes that patch() makes to a model, and how they are taken back."""
