"""One process that makes and drops engine after engine on one daemon: nothing of either grows. docs/soak.md."""
