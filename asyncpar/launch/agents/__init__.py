"""Agents that outlive jobs and leaders: ``asyncpar agent`` on every host, one job after another."""
