"""DistillationTrainer: the hook, transfer from inside the teacher, and the student's own samples."""
