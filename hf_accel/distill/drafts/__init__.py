"""Students made of a teacher's layers, and draft models for speculation: trained and measured."""
