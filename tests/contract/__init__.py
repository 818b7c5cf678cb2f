"""What clients that others wrote meet: tritonclient in its four forms, KServe's client."""
