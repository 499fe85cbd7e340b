"""The protocol of paged attention, and plain torch. Kernels are in ../cuda and ../cpu."""
