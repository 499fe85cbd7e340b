"""The Helm chart, its pods, and the queries of dashboards and alerts."""
