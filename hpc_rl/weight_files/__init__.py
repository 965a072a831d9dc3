"""Files of published weights: differences between two versions, and the chains that rebuild any version."""
