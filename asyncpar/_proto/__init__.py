"""Generated from proto/ by scripts/generate-protos; do not edit."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
"""The descriptors of our messages; stubs that a program makes from proto/ itself are in the usual pool, beside them."""
