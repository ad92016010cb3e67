"""More than one process for one model: tensor parallel, context parallel."""
