"""The user's model: named, built, its own tensors exchanged for fakes and found again."""
