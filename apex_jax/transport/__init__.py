"""How experience and weights travel: messages as frames (`wire`), params as bytes (`params_codec`), the links."""
