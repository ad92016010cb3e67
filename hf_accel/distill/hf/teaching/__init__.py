"""The hook that makes a model's loss the objective, and what it must know of models and trainers."""
