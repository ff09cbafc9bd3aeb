"""Components of torchx, which finds them by the entry point ``torchx.components``; nothing else imports them."""
