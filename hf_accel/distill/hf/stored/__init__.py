"""A teacher on disk: what it said of each row, found by the row's own hash."""
