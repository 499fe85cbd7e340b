"""OpenAI's HTTP API.

A new parameter is a field in requests.py. If other_fields.py has it, take it out there.
Of gRPC it is a field in protos/outrider/v1, which outrider/rpc/codec.py reads.
"""
