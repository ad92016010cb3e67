"""Who is computed in a pass, and who waits."""
