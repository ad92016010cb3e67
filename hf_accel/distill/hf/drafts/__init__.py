"""Students made of a teacher's layers, and drafts: trained, measured."""
