"""A plan for human readers: text, sections, schedule views."""
