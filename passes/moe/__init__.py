"""MoE layers behind a router, found by the meaning of their ops: nothing here reads a name.

Begin at ``find`` and ``open``: the first lists the layers of a program as ``layers.ExpertLayer``; ``open.to_rows``
computes one of them on rows grouped by expert (``exchange`` lists the calls around these, ``domain`` marks the values
among them). In one process these calls move nothing: tests hold the rows against the program in this form.

Found in ``find``: ``expert_dims`` (which integers are numbers of experts, which dims count them), then ``paths``
(stacks, from the tokens to the sum), or a loop's branches.
Opened in ``open``, by how tokens and experts are combined: ``RowOpening`` (that the model sorted), ``opening_slots``,
``opening_pairs`` (stacks and every token), ``opening_branches`` (loops); all on ``opening``. Then ``tokens_once``.

Two provers: where the graph shows them, ids and dims of experts are followed by the rules of ops (``expert_dims``,
``passes.rules.follow``, the layouts of ``token_rows``). A model may sort, count and mask in any way: there facts are
shown by computing values for random choices (``routing``, with ``branch_facts`` on it).
"""
