"""How many tokens are drafted, by whom, and which of them stay."""
