"""A plan as one page of HTML that needs nothing else: pictures of all that was decided, then every table."""
