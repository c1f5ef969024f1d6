"""What the routing of a decode was like."""
