"""A plan for eyes: text, sections, schedule views."""
