"""Who teaches: a model in memory, a student without its adapters, or answers that were stored on disk."""
