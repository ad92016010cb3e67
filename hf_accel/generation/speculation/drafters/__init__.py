"""Where drafts come from: looked up in what was written, or written by a smaller or coarser model."""
