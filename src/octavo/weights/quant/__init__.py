"""Quantized weights: reading the checkpoints of others, and making our own.

integer.py     `IntegerWeight`: codes, scales and zeros of one matrix, and the form that native packing takes
settings.py    `quantization_config` of config.json, checked
layouts.py     how GPTQ, AWQ and compressed-tensors store a matrix
folder.py      `QuantizedFolder`: such a checkpoint as a `WeightSource` of float32 views
targets.py     the formats that `octavo quantize` writes
rounding.py    round to nearest, on arrays (backends/quantization.py is the definition)
gptq.py        errors fed forward through the Hessian of the inputs
scaling.py     AWQ and SmoothQuant: channel scales moved from activations into weights
tapping.py     runs a captured program and lets a hook see what each matrix multiplies
job.py         the whole of `octavo quantize`; outputs.py writes the folder; measure.py compares
"""
