"""Facts: what lines of many ranks say together, each joined once a case. Analysts reason from them."""
