"""A plan for human readers: text, sections, schedule views.

Begin at `text`. `sections` and `section` make tables of rows, `differences` compares two plans, `alternatives` is
`--why`; `page/` is the HTML.
"""
