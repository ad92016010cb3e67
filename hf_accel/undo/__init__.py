"""What patch() changes on a model, and its way back."""
