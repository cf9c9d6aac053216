"""Architectures, each a short file over the ops: `ModelConfig`, rotary tables, registry.

config.py      `ModelConfig`, `RopeConfig`: what a forward pass needs to know, checked
keys.py        typed, bounded reading of a configuration with Hugging Face keys
rope.py        rotary frequencies: default, linear, llama3, yarn
decoder.py     what every decoder does before and after its layers; the blocks that layers share
registry.py    model type to class: adding a model is one file and one line there
"""
