"""Model weights: file readers, name maps, configuration, and the store that fetches them.

tensors.py        the common view (`WeightSource`) and `CorruptFile`
safetensors.py    safetensors files, single and sharded: reader and writer
gguf.py           GGUF files; gguf_dequant.py the block formats; gguf_vocab.py what a vocabulary must satisfy
names.py          GGUF names and layouts to the Hugging Face ones; `open_weights`
config.py         `load_config_dict`: HF-style keys from config.json or from GGUF metadata (gguf_config.py)
store.py          `ModelStore`: a name, hub id, folder or file to files on this machine
"""
