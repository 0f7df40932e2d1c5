"""What will read a data set that is not in memory yet, and what training will wait for.

======================  ============================================================================
`serving`               the feed that will read it, and what bounds an epoch
`disk`                  what a disk reads and writes
======================  ============================================================================
"""
