"""What a model is: its shape (`spec`), its weights (`loader`, `gguf`, `dummy`), its forward pass (`decoder`).

No scheduling, no KV memory and no sampling here. Nothing in this folder runs code that came with a model:
no pickle, no custom modules, only tensors and settings.
"""
