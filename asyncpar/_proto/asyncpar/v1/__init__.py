"""Generated from proto/ by scripts/generate-protos; do not edit."""
