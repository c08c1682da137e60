"""The quick start as a new user walks it: typed from the page, with a real daemon and `vllm serve`."""
