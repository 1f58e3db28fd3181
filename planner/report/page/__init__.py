"""A plan as one self-contained HTML page: pictures of all decisions, then every table."""
