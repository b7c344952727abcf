"""The gym: judges kernels. See docs/architecture.md for its processes and DESIGN section 4 for the contract."""
