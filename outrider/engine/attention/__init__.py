"""The protocol of paged attention, and plain torch.

The kernels are ../cuda/kernels/attention.py and ../cpu/attend.py.
"""
