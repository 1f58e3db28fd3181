"""Files: the training state, and Hugging Face directories; written completely or not at all.

Begin at `saver` for writing and at `saves` for finding. `manifest` describes a save, `lines` the order of saves;
`pretrained_load`, `pretrained_save` and `conversion` read and write directories of the Hub.
"""
