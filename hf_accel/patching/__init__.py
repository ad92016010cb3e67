"""From what a user asks to a patched model, and back: look, plan, explain, write, undo."""
