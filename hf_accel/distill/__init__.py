"""Training a small student, or a draft, from a large teacher."""
