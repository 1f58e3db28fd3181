"""Names and builds the user's model; exchanges its tensors for fakes and finds them again in the capture.

Begin at `reference`: a name or file becomes a model. `exchange` puts fake tensors in the place of its own, `assembly`
and `hub_format` say how parameters are made of stored tensors.
"""
