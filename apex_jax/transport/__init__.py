"""How experience and weights travel: pixels as bytes (`codec`), messages as frames (`wire`), the links (`sockets`)."""
