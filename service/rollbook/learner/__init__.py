"""The learner side: objectives, advantages, corrections and everything else that needs torch."""
