"""The codecs of asyncpar as a communication hook of DistributedDataParallel."""
