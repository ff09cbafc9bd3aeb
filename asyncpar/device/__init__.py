"""Arrays that live on devices, and what moves and encodes them there."""
