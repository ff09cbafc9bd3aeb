"""Our codecs as a communication hook of DistributedDataParallel."""
