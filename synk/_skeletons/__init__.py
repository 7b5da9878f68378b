"""Operations on rows that communicate while they run."""
