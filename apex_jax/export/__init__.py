"""A trained policy as files that others can use: `python main.py export RUN FOLDER`.

folder          the files of an exported policy
export_command  `python main.py export`
programs        the policy as StableHLO and ONNX
onnx_graph      makes the ONNX from JAX's own trace
check           compares the exported programs with the policy itself
model_card      the page of an exported policy on the Hugging Face hub
"""
