"""Instruction data: conversations become samples in which the tokens are labels that the model would generate.

Begin at `prepare`; `supervised` has the rule, `conversation` reads rows, `chat_tokenizer` renders the template.
"""
