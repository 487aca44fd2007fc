"""A trained policy as files that others can use: `python main.py export RUN FOLDER`.

folder          the files of an exported policy: programs, checked against it, and parameters
export_command  `python main.py export`
onnx_graph      makes the ONNX from JAX's own trace
model_card      the page of an exported policy on the Hugging Face hub
"""
